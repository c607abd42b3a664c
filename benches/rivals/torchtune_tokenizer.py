"""A torchtune tokenizer over a `tokenizer.json`: beginning of text, prompt, response, end of text; loss on the response."""

from tokenizers import Tokenizer
from torchtune.data import truncate

PROMPT = "Summarize this dialogue:\n{}\n---\nSummary:\n"


class JsonTokenizer:
    """What torchtune's `instruct_dataset` asks of a tokenizer, with the prompt of the template `summarize`."""

    def __init__(self, path, bos, eos, max_seq_len=None):
        self.tokenizer = Tokenizer.from_file(path)
        self.bos_id, self.eos_id = self.tokenizer.token_to_id(bos), self.tokenizer.token_to_id(eos)
        self.pad_id, self.max_seq_len = self.eos_id, max_seq_len

    def encode(self, text, add_bos=True, add_eos=True):
        """What its `text_completion_dataset` asks of one."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos_id] * add_bos + ids + [self.eos_id] * add_eos

    def __call__(self, sample, inference=False):
        tokens, mask = [self.bos_id], [True]
        for message in sample.pop("messages"):
            text = "".join(part["content"] for part in message.content)
            if message.role == "user":
                text = PROMPT.format(text)
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if message.role == "assistant":
                ids = ids + [self.eos_id]
            tokens += ids
            mask += [message.masked] * len(ids)
        if self.max_seq_len:
            tokens = truncate(tokens, self.max_seq_len, self.eos_id)
            mask = truncate(mask, self.max_seq_len, False)
        return sample | {"tokens": tokens, "mask": mask}
