"""Look before and while you train: plans, explanations, traffic and a picture.

Files, each importing only from those above it:

    buckets   a bucket's figures, of a sharded module or of a plan
    survey    a module's units and buckets as integers and names
    arrange   the events of a step as units are known to run
    static_buffers  what is kept at fixed addresses
    text      numbers, tables, dataclasses as plain data
    traffic   what is communicated: counted in a scope, or planned
    notes     what a plan points out
    explain   explain: what is in memory now, and why
    schedule  a training step played with integers
    runs      what a step does with modules, recorded
    activations  what a forward takes besides weights, measured without memory
    advice    what to change so that a plan needs less
    figures   a plan's figures, as data and as text
    plan      plan: what sharding a module costs
    timeline  trace: when units were gathered, computed with and reduced
    plots     plans and recordings as pictures
"""

from fsdp_compose.report.buckets import PlannedBucket
from fsdp_compose.report.explain import Explanation, UnitState, explain
from fsdp_compose.report.figures import Memory, Plan, PlannedUnit
from fsdp_compose.report.plan import plan
from fsdp_compose.report.plots import plot_memory, plot_plan, plot_shards, plot_timeline
from fsdp_compose.report.schedule import Peak
from fsdp_compose.report.survey import Loan
from fsdp_compose.report.timeline import Timeline, trace
from fsdp_compose.report.traffic import TrafficReport, count_traffic

__all__ = [
    "Explanation",
    "Loan",
    "Memory",
    "Peak",
    "Plan",
    "PlannedBucket",
    "PlannedUnit",
    "Timeline",
    "TrafficReport",
    "UnitState",
    "count_traffic",
    "explain",
    "plan",
    "plot_memory",
    "plot_plan",
    "plot_shards",
    "plot_timeline",
    "trace",
]
