"""``fully_shard``, ``undo`` and ``refresh``: what was planned is built and attached to modules.

Files, each importing only from those above it:

    entrances    what torch calls: hooks on a unit's module, functions of sharded parameters
    build_unit   initialises a unit, cuts its shards, attaches its state and hooks
    undo         makes sharded modules plain again
    fully_shard  plans, compares, builds
    refresh      after modules were edited: shards new parameters, gives back unused ones
"""
