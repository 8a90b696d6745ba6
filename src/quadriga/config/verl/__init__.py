"""Settings of verl as settings of ours.

table.py      what each setting of verl becomes
unused.py     which settings of verl others leave without effect
settings.py   read verl's file and command line, apply the table, list what is ignored
"""
