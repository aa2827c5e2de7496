"""`python -m poise.deepspeed > docs/deepspeed.md` renews the page of DeepSpeed's settings."""

from poise.deepspeed.keys import reference

print(reference(), end="")
