"""Recordings of parts of a training step: made, proven, guarded, lent, released. Needs torch and nothing else."""
