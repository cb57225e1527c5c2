"""One small file per experiment: the four of the paper, and the demo."""
