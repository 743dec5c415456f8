"""Experiments that anyone can repeat: the paper's figures, and ours beside them.

Each experiment is a module with a function that runs it and one that tells it as a
`moshpit.experiments.section.Section`; `moshpit.experiments.catalogue` lists them all and
`moshpit.experiments.report` writes their sections as one page. Plots need matplotlib
(``pip install 'moshpit[experiments]'``).
"""
