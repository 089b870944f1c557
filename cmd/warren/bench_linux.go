package main

import "github.com/spf13/cobra"

func benchCommand(a *app) *cobra.Command { return &cobra.Command{Use: "bench"} }
