"""The HTML pages: their sections, and the frame around them.

frame.py          render: one HTML file, its security policy, escaping
run.py            run_page, compare_page
capacity.py       what `kvtune capacity` found
comparison.py     the sections of a comparison
study.py          a sweep's or a search's page, from the `StudyView` that `tune.study` makes of its journal
study_charts.py   the charts of a study's page
"""
