"""Which ranges of which tensor belong to which rank: pure arithmetic, standard library only."""
