"""Training of the demo models, one step per module.

`text` reads demo/text, `tokenizer` learns the byte pairs and holds the chat template, `examples` mixes
training sequences, `model` is the network, `train` fits it, `export` writes the files, `check` judges them.
The command line is scripts/train_demo_models.py, which calls them in this order.
"""
