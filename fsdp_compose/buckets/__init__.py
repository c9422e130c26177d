"""What a bucket is: its parameters, its flat buffers with all their views, and how it is copied.

Files, each importing only from those above it:

    bucket     parameters of one dtype, trainability and mesh in one flat buffer
    entries    which entry a parameter stands for, and what a module may read from it
    build      a bucket's buffers, with every view of them that a step needs
    issue      does work on its buffers on a stream, named in the log and in a profile
    gather     fills the gathered buffer from the shards, and tells when these were written
    gradients  the flat buffer that gradients are packed into; cuts the reduced one
    reduce     sums the packed gradients over the ranks, so that each gets its part
    static     buffers at fixed addresses, in which buckets of several units take turns
    copies     independent buckets around the copies of a model's parameters
"""
