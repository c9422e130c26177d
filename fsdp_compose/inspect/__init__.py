"""Look before and while you train: plans, explanations, traffic and a picture.

text.py      numbers, tables, dataclasses as plain data
survey.py    a module's units and buckets as integers and names
schedule.py  a training step played with those integers
notes.py     what a plan points out
plan.py      ``plan``: the two together
render.py    a plan as text
plots.py     a plan as a picture
explain.py   ``explain``: what is in memory now, and why
traffic.py   what was communicated
"""

from fsdp_compose.inspect.explain import Explanation, UnitState, explain
from fsdp_compose.inspect.plan import Memory, Plan, PlannedUnit, plan
from fsdp_compose.inspect.plots import plot_plan
from fsdp_compose.inspect.schedule import Communication, Peak
from fsdp_compose.inspect.survey import Loan, PlannedBucket
from fsdp_compose.inspect.traffic import TrafficReport, count_traffic, traffic_report

__all__ = [
    "Communication",
    "Explanation",
    "Loan",
    "Memory",
    "Peak",
    "Plan",
    "PlannedBucket",
    "PlannedUnit",
    "TrafficReport",
    "UnitState",
    "count_traffic",
    "explain",
    "plan",
    "plot_plan",
    "traffic_report",
]
