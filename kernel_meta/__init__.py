"""Tables, sources and cubins of the kernels that exist."""
