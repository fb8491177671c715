"""What people look at: pages, the console, files for other tools. Computes only what a drawing needs.

In: a `Run` (with its workload, made again by `analysis.rebuild`) and results of `kvtune.analysis`. Out: one
self-contained HTML file, text for a terminal, files for other tools. Never imports `tune`.
Imported by: cli.

    Run --> analysis.<noun>(run) --> sections/<noun>.py --> Section --> templates/<template>
                                                               |
         pages/frame.py: base.html + sections + styles + specs + columns + Vega's bundle + page.js = one file

    sections/     one noun each: asks analysis, words it, makes charts
    pages/        the frame, and which sections a page has
    console/      the same for a terminal
    export/       Perfetto, speedscope, CSV
    charts.py     Section, Chart (spec, text alternative, table), Grid, thinning that keeps extremes
    contrast.py   several runs against the first: which are sides, which are repetitions of one side
    measures.py   names and units of figures
    names.py      names of processes and causes
    banners.py    what a reader must know before reading any number
    files.py      writes whole or not at all, and over nothing without --force
    stalls.py     Slow tokens in words: from the account's `--json` objects to one line a stall and to tables
    listing.py    What a list of runs shows about each: a few figures that tell them apart
    templates/    Jinja2, autoescape
    assets/       one style sheet, one script

A page's rules: no address outside the file (its policy forbids loading anything and runs only the two scripts whose
hashes it names); text before charts; colours are CSS variables, so one drawing serves light, dark and print; every
chart has a label in words and its numbers as a table; a chart whose data were thinned says so.
"""
