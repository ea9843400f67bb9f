"""One small file per schedule family."""
