"""Decisions as pure functions of counts and times: no torch, no SGLang."""
