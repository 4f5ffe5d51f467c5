"""Train on rows and a reward of your own: python examples/python/own_run.py [MODEL [OUTPUT_DIR]]."""

import sys

from megatron_dapo import Recipe, train

model, output_dir = (*sys.argv[1:], *("examples/quickstart/base_model", "runs/own_run")[len(sys.argv) - 1 :])

question = "Tom has {} stamps. In May Tom gets {}. How many stamps does Tom have at the end?"
rows = [{"question": question.format(a, b), "answer": str(a + b)} for a in range(10, 30) for b in range(2, 12)]


def reward(sample):
    return 1.0 if sample.response.split()[-1:] == [sample.answer] else 0.0


recipe = Recipe(
    model,
    rows,
    reward,
    prompt_column="question",
    output_dir=output_dir,
    run={"total_steps": 2},
    rollout={"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 64, "filter_groups": False},
    training={"mini_batch_prompts": 4},
    settings={"data.max_prompt_tokens": 128},
)
result = train(recipe)
print(f"{len(result.metrics)} steps, mean reward {result.metrics[-1]['reward/mean']:.2f}, model in {result.model}")
