"""Rejection sampling: from verified responses to a data set for supervised fine-tuning.

embed   embeddings of responses: the policy's hidden states, a sentence encoder's, or word n-grams
choose  the responses that are kept, and the fate of each other one
card    the data card: counts, quantiles and pictures
run     the command: sample, verify, choose, write
rounds  stages of fine-tuning, rejection sampling and training
"""
