"""One rank of the pipeline at work: executor, transport, whole-batch state, failure watch, profiler."""
