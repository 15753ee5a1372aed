"""Trainers of whole models, which share one loop, `common`.

python -m examples.studies.lm             # a language model
python -m examples.studies.dlrm           # a click model of 26 tables
python -m examples.studies.cnn            # images: dense gradients
python -m examples.studies.sparsifiers    # what sparsifiers learn
"""
