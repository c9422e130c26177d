"""``fully_shard`` and ``undo``: choose units, compare ranks, initialise, build, refresh.

Files, each importing only from those above it:

    names            names of parameters and the parameters of names
    tensor_parallel  parameters that tensor parallelism split before
    plans            what is to be built: options, parameters, buckets, units
    trace            the order in which a module uses its parameters, without running it
    wrap             policies that choose which submodules become units
    choose_buckets   which parameters of a unit share a bucket, and each bucket's layout
    choose_units     which modules become units, with which options
    compare_ranks    what ranks compare before anything is sharded
    initialise       meta parameters get values: from an initialisation, rank 0 or a seed
    build_unit       initialises a unit, cuts its shards, attaches its state and hooks
    undo             makes sharded modules plain again
    fully_shard      plans, compares, builds
    refresh          after modules were edited: shards new parameters, gives back unused ones
"""
