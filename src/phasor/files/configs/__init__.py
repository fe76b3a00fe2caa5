"""Reads the rope of every layer from config files of other programs, and writes a rope's block.

The formats are Hugging Face ``config.json`` (transformers 4 and 5), ``transformer/config.json`` of
diffusers, ``params.json`` of Mistral and Meta, DeepSeek's inference configs, GGUF, and the files of
programs that train and serve models, in JSON or YAML (`texts`). This package and `dialects` are the
only places that know foreign key names. Nothing is guessed: a key that contradicts what the model's
class does, two keys that disagree or a value out of range is a `ConfigError` that names the key.

A config is read in three stages. `source` returns the contents of the file, a `JsonObject`.
`model_class` interprets them like the class of the model type, as a `ModelConfig`: the part of the
file, its keys, and for every layer the kind and the block. `ropes` makes the `LayerRopes`, whose
laws `rope_blocks` reads; `unread_keys` notes or refuses the unread keys of every format. For other
formats the second stage is in the dialects, which share `program_model`. `facts` has the tables as
values; `dialects.blocks` writes a rope back as a config block.
"""
