"""Answers of a given form: which tokens may come next, by JSON schema, regex, choice or grammar.

A `request.Grammar` says what is wanted, `GrammarCompiler` checks and compiles it outside the
engine, and a `Constraint` follows one sequence. The work is done by llguidance. Nothing is imported
here: the process that tries grammars out needs no arrays.
"""
