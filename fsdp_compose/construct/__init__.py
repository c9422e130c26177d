"""What ``fully_shard`` is to build: names, policies, units and buckets, compared between ranks.

Files, each importing only from those above it:

    names            names of parameters and the parameters of names
    tensor_parallel  parameters that tensor parallelism split before
    plans            what is to be built: options, parameters, buckets, units
    trace            the order in which a module uses its parameters, without running it
    wrap             policies that choose which submodules become units
    deterministic    the same bits at any number of ranks: what a model must be for it
    choose_buckets   which parameters of a unit share a bucket, and each bucket's layout
    overlaps         tensors in the same memory that are not one parameter
    choose_units     which modules become units, with which options
    compare_ranks    what ranks compare before anything is sharded
    initialise       meta parameters get values: from an initialisation, rank 0 or a seed
"""
