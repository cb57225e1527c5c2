"""Certified is earned: trainings whose guarantee is broken, and trainings that are sound, each complete.

case             what a case is, what became of it, and how its training is made private
parts            data and small models that several cases share
hub              tiny models of transformers, sentence-transformers and peft, with random weights
ranks            several processes on one machine, and what each of them is told
broken           BROKEN: every training that must be refused or not certified
broken_models    examples meet in the model
broken_losses    examples meet in the loss, wherever the loss lives
broken_rows      the rows of a batch are not its examples, or are not the ones that were drawn
broken_content   what carries no noise is trained, saved or decided by
broken_processes several processes
sound            SOUND: every training that must end certified
sound_models     models of many kinds
sound_hub        models and losses of other people's libraries
sound_losses     losses whose terms each depend on one example
sound_loops      what people do around a loop
table            prints what becomes of every case: python -m tests.certified.table
"""
