"""Finding passages of documents that an answer may rest on: three retrievers and a reranker.

Knows neither requests nor models: text and a deadline go in, passages come out. What becomes of
them is decided by the gateway.
"""
