"""Measuring the planner's tables on the model runner that will serve."""
