"""Shows results to people: HTML pages, text on a terminal, files for other tools. Computes only what a chart needs.

In: a `Run`, its workload (rebuilt by `analysis.rebuild`) and results of `kvtune.reading.analysis`. Out: one
self-contained HTML file, text for a terminal, files for other tools. Never imports `tune`.

    Run --> RunAnalysis --> sections/<name>.section(analysis) --> Section: tables, facts, notes, charts
                                     run.document(analysis) --> Document --> kvtune/data/show: page, terminal, Markdown

Rules for pages: no links to other files or sites (the page's security policy forbids loading and allows only two
scripts, by hash); text before charts; colours are CSS variables, so that one drawing serves light, dark and print;
each chart has a label in words and a table of its numbers, and says if some of its data are not drawn.
"""
