/* A linear layer's weight, and what its product takes in. */
#pragma once
#include <string.h>
#include "vectors.h"

#define LINE 64 /* bytes that memory gives and takes at once */

INLINE long at_most(long number, long most) { return number < most ? number : most; }

typedef struct {
    const void *weight; /* [rows, inputs]; of INT16 as ``pack`` lays them */
    const void *bias;   /* [rows] in the result's type, or null */
    const float *scale; /* of an INT8 weight [rows], of INT16 its steps, or null */
    long rows, inputs, type;
} Linear;

/* Rows of numbers, and what ``narrow`` makes of them for some weights: bfloat16, or integers. */
typedef struct {
    const float *wide;
    uint16_t *pairs; /* of the same shape */
    float *steps;    /* of each chunk of integers */
} Inputs;
