from __future__ import annotations

from megatron_dapo.evaluation.protocol import EvaluationProtocol

PROTOCOL = EvaluationProtocol(
    model="runs/a",
    dataset_path="aime.parquet",
    dataset_sha256="0" * 64,
    num_dataset_rows=960,
    num_problems=1,
    num_samples=4,
    temperature=1.0,
    top_p=0.7,
    top_k=0,
    max_new_tokens=20,
    stop_token_ids=(2,),
    seed=11,
    engine="fake",
    engine_version="1",
    chat_template_sha256="1" * 64,
    verifier="dapo",
    verifier_version="1",
)
