"""JSON Lines in and out: input lines with their prompt and sampling options, and one output record for each."""

from mpi_tp.records.inputs import prompt_lines, read_lines
from mpi_tp.records.keys import LineKeys
from mpi_tp.records.lines import BadLine, InputLine, Line, Message, Prompt
from mpi_tp.records.outputs import OrderedWriter, error_record, record, write_meta
from mpi_tp.records.resumable import Earlier, ResumableWriter, open_earlier

__all__ = [
    "BadLine",
    "Earlier",
    "InputLine",
    "Line",
    "LineKeys",
    "Message",
    "OrderedWriter",
    "Prompt",
    "ResumableWriter",
    "error_record",
    "open_earlier",
    "prompt_lines",
    "read_lines",
    "record",
    "write_meta",
]
