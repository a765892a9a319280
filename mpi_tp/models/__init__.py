"""Model families: one file each with config parsing and what sets it apart; modules know nothing of MPI or NCCL."""
