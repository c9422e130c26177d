"""Where every element lives, and who owns whole matrices: integers only, no tensors, no groups.

Files, each importing only from those above it:

    shards          a bucket cut into equal rank shards, proved where it is built
    planner         plans a layout: the default of ``fully_shard(..., layout=)``
    matrix_work     balances the work on whole matrices over the ranks
    boxes           a flat range as rectangular boxes
    static_buffers  which buffer at a fixed address each unit is gathered into
"""
