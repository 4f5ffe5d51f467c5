"""Evaluation: the accuracy of a model, by a stated protocol, with its confidence interval.

prompts -> runner (any engine, any scorer) -> estimators (by problem, with intervals) -> protocol (the result file)
"""
