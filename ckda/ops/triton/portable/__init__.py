"""The chunk form for every GPU that Triton compiles for: any dtype, gate, length and head."""
