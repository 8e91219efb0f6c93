"""The tasks that recurrences are compared on: regular languages, words of S5, traces of a program, recall."""
