"""Saves the golden llama31 in the 8 bits of LLM.int8, on a CPU (bitsandbytes 0.50.2, transformers 5.23, torch 2.15)."""

from pathlib import Path

from transformers import AutoModelForCausalLM, BitsAndBytesConfig

here = Path(__file__).parent
settings = BitsAndBytesConfig(load_in_8bit=True)
model = AutoModelForCausalLM.from_pretrained(here.parents[1] / "llama31", quantization_config=settings, device_map="cpu")
model.save_pretrained(here)
(here / "generation_config.json").unlink(missing_ok=True)
