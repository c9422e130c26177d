"""Clipping, loss scaling, plain tensors for fast optimizers, optimizers of whole matrices.

Files, each importing only from those above it:

    flat    plain tensors over the shards
    strays  steps over sharded parameters and plain unaveraged ones (D18)
    clip    norms and clipping, and the guard on optimizer steps (D12)
    owner   one rank has each matrix and computes its update once
    scaler  loss scaling whose ranks agree on overflow
"""
