"""The HTML pages: their sections, and the frame around them.

run.py            run_page, compare_page
comparison.py     the sections of a comparison
study.py          a sweep's or a search's page, from the `StudyView` that `tune.study` makes of its journal
study_charts.py   the charts of a study's page
"""
