"""Communicators: one protocol (`base`), and its implementations over NCCL, MPI, threads and nothing; and mail."""
