"""The shard set on disk: one HDF5 file a rank and a manifest. The sharder writes it, the programs read it."""
