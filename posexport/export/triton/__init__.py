"""Model repositories of the Triton Inference Server; `package` is where to begin."""
