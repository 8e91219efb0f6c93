"""The chunk form for Hopper (H100, H200), in Triton's lower-level dialect (Gluon)."""
