// Names per instruction set: the build compiles a file of kernels once per set, with ONNXTRAIN_INSTRUCTION_SET as its
// name.
#pragma once

#define ONNXTRAIN_JOIN_(a, b) a##b
#define ONNXTRAIN_JOIN(a, b) ONNXTRAIN_JOIN_(a, b)
#define ONNXTRAIN_TEXT_(a) #a
#define ONNXTRAIN_TEXT(a) ONNXTRAIN_TEXT_(a)

// `name` with the suffix of the current instruction set.
#define ONNXTRAIN_OF_SET(name) ONNXTRAIN_JOIN(name, ONNXTRAIN_INSTRUCTION_SET)
