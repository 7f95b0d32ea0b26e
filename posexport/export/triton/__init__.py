"""Model repositories of the Triton Inference Server; `package` is the entry point."""
