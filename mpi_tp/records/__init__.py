"""JSON Lines in and out: input lines with their prompt and sampling options, and one output record for each."""

from mpi_tp.records.inputs import prompt_lines, read_lines
from mpi_tp.records.lines import BadLine, InputLine, Message, Prompt
from mpi_tp.records.outputs import OrderedWriter, error_record, record, write_meta

__all__ = [
    "BadLine",
    "InputLine",
    "Message",
    "OrderedWriter",
    "Prompt",
    "error_record",
    "prompt_lines",
    "read_lines",
    "record",
    "write_meta",
]
