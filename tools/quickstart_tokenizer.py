"""The quickstart's tokenizer: Qwen2's class and splitting rules (digits one by one), its own small vocabulary.

It is byte-level, so any text round-trips. The two sentences of the DAPO template, which every prompt carries, are one
token each (`template_sentences`): prompts stay short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def template_sentences(template: str) -> tuple[str, str]:
    """Return the prompt template's text before and after the problem, blank lines included."""
    before, after = template.split("{problem}")
    return before, after


def train_tokenizer(texts: Iterable[str], template: str, vocab_size: int) -> Qwen2Tokenizer:
    """A tokenizer of at most `vocab_size` + 2 entries: 3 special tokens, 256 bytes, the merges `texts` teach, and
    the sentences of `template`."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    learned.train_from_iterator(texts, trainer)
    # The special tokens' numbers must be fixed before the class sees them: training in place would renumber them.
    tokenizer = Qwen2Tokenizer(
        vocab=learned.get_vocab(),
        merges=[tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]],
        unk_token=None,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )
    sentences = [AddedToken(text, normalized=False, special=False) for text in template_sentences(template)]
    tokenizer.add_tokens(sentences)
    return tokenizer
