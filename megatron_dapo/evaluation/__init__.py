"""How good is a model, by which protocol, and how sure is that.

prompts -> runner (any engine, any scorer) -> estimators (by problem, with intervals) -> protocol (the result file)
"""
