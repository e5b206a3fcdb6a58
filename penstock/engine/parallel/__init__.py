"""Runs one model over several processes: tensor, pipeline and expert parallelism. See docs/parallelism.md."""
