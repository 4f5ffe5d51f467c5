"""Rejection sampling: selects verified responses for a supervised fine-tuning data set.

embed   embeddings of responses: the policy's hidden states, a sentence encoder's, or word n-grams
choose  the kept responses, and the fate of all others
card    the data card: counts, quantiles and pictures
run     the command: sample, verify, choose, write
rounds  stages of fine-tuning, rejection sampling and training
"""
