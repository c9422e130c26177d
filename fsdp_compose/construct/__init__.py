"""``fully_shard`` and ``undo``: choose units, agree between ranks, initialise, attach, refresh.

Files, each importing only from those above it:

    names        names of parameters and the parameters of names
    parallel     parameters that tensor parallelism split before
    plans        what is to be built: options, parameters, buckets, units
    trace        the order in which a module uses its parameters, without running it
    wrap         policies that choose which submodules become units
    collect      decides which units to build from what; changes nothing
    agree        what ranks must agree on before anything is sharded
    init         materialised from the meta device, taken from rank 0, seeded by name
    fully_shard  builds, attaches and hooks; undo takes it back
    refresh      after surgery: shards what is new, forgets what is gone
"""
