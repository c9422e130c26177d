"""Where every element lives, and who owns whole matrices: integers only, no tensors, no groups.

Files, each importing only from those above it:

    plan  cuts a bucket into equal rank shards and proves the cut
"""
