"""Reads the rope of every layer from config files of other programs, and writes a rope's block.

The formats are Hugging Face ``config.json`` (transformers 4 and 5), ``transformer/config.json`` of
diffusers, ``params.json`` of Mistral and Meta, DeepSeek's inference configs, GGUF, and the files of
programs that train and serve models, in JSON or YAML (`texts`). This package and `dialects` are the
only places that know foreign key names. Nothing is guessed: a key that contradicts what the model's
class does, two keys that disagree or a value out of range is a `ConfigError` that names the key.

A config is read in three stages. `source` gives what the file says, a `JsonObject`. `model_class`
makes of it what the class of its model type would, a `ModelConfig`: which part of the file, under
which keys, and for every layer its kind and its block. `ropes` makes the `LayerRopes`, whose laws
`rope_blocks` reads; `unread_keys` notes or refuses the keys that nothing read, of every format.
The second stage of other formats is in the dialects, which have what `program_model` offers to all
of them. `facts` has the tables as values, and `writing` writes a rope back as a config block.
"""
