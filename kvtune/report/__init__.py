"""What people look at: pages, the console, files for other tools. Computes only what a drawing needs.

In: a `Run` (with its workload, made again by `analysis.rebuild`) and results of `kvtune.analysis`. Out: one
self-contained HTML file, text for a terminal, files for other tools. Never imports `tune`.
Imported by: cli.

    Run --> analysis.<noun>(run) --> sections/<noun>.py --> Section: tables, facts, notes, charts
                                                               |                 |
         pages/frame.py: base.html + sections + specs + columns + script      console: its terse tables

    sections/     one noun each: asks analysis, words it, makes tables and charts. A new one is one file
    pages/        the frame, and which sections a page has
    console/      a terminal's first screen; comparisons, recipes and lists on a terminal
    export/       Perfetto, speedscope, CSV
    parts.py      Section, Grid, Chart: what page and terminal draw
    charts.py     how charts are drawn; thinning that keeps extremes
    contrast.py   several runs against the first: which are sides, which are repetitions of one side
    trials.py     the table of trials, for page and terminal
    figures.py    the figures of a comparison as a table
    names.py      commands, files and times in words
    banners.py    what a reader must know before reading any number
    files.py      writes whole or not at all, and over nothing without --force
    templates/    Jinja2, autoescape
    assets/       one style sheet, one script

A page's rules: no address outside the file (its policy forbids loading anything and runs only the two scripts whose
hashes it names); text before charts; colours are CSS variables, so one drawing serves light, dark and print; every
chart has a label in words and its numbers as a table; a chart whose data were thinned says so.
"""
