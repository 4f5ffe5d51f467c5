"""SGLang's own automaton against the reference, and what it reads of our documents. Its servers draft on GPUs only."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dapo.engines.sglang.drafting import documents_of, write_tokenizer

pytestmark = pytest.mark.slow
SHIM = """
import json, sys
sys.path[:0] = [sys.argv[1] + "/benchmarks", sys.argv[1]]
from megatron_dapo.engines.sglang import cpu
cpu.prepare_imports()
"""
READ = """
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
tokenizer = get_tokenizer(sys.argv[2])
print(json.dumps([list(tokenizer.encode(document, add_special_tokens=False)) for document in json.loads(sys.argv[3])]))
"""
# Prints the paths of SGLang's draft trees for random documents and contexts, and those of the reference.
COMPARE = """
import random
from drafts.automaton import SEPARATOR, SuffixAutomaton
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

def paths(tree):
    return [(token, *rest) for token, below in tree.items() for rest in (paths(below) or [()])]

draw, found = random.Random(0), []
for case in range(40):
    nodes, size = draw.randint(1, 11), draw.randint(2, 6)
    documents = [[draw.randint(1, size) for _ in range(draw.randint(1, 60))] for _ in range(draw.randint(1, 4))]
    context = [draw.randint(1, size) for _ in range(draw.randint(1, 30))]
    corpus = NgramCorpus(max_trie_depth=18, max_bfs_breadth=10, draft_token_num=nodes + 1, external_sam_budget=nodes, capacity=1000)
    chunks = [([SEPARATOR] if index else []) + document for index, document in enumerate(documents)]
    corpus.commit_external_corpus_load("one", corpus.load_external_corpus_named("one", chunks))
    ids, mask = corpus.batch_get(["request"], [context[-18:]], [len(context)])
    rows = mask.reshape(nodes + 1, nodes + 1).tolist()
    theirs = [path[1:] for path in corpus.leaf_paths_from_mask(ids.tolist(), rows)]
    theirs = sorted(path for path in theirs if path and path != [0])
    ours = sorted(map(list, paths(SuffixAutomaton(documents).draft(context, nodes))))
    found.append([theirs, ours])
print(json.dumps(found))
"""


def test_the_reference_drafts_what_sglang_drafts(engine_python: Path, repository: Path) -> None:
    found = run(engine_python, COMPARE, repository)
    assert len(found) == 40 and sum(len(ours) for _, ours in found) > 40
    for theirs, ours in found:
        assert theirs == ours


def test_sglang_reads_documents_of_token_ids_back_exactly(engine_python: Path, repository: Path, tmp_path: Path) -> None:
    responses = [[5, 6, 7, 299], [8, 9], [0, 0, 0]]
    documents = documents_of([np.array(tokens, np.int32) for tokens in responses])
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 300)
    assert run(engine_python, READ, repository, str(tokenizer), json.dumps(documents)) == responses


def run(python: Path, program: str, repository: Path, *arguments: str) -> Any:
    """Return the JSON that a program of the engine's environment prints last."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(Path.home()),
        "SGLANG_USE_CPU_ENGINE": "1",
        "CXX": "c++ -include cstddef",  # a header of SGLang 0.5.17 uses size_t without it
    }
    command = [python, "-c", SHIM + program, str(repository), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
